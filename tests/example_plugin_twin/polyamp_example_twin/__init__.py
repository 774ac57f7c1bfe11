"""A distribution that registers a backend name which another one has. Its plug-in is never loaded: the names clash first."""
