"""Importing this is the failure that the clash of names has to come before."""

raise RuntimeError("the plug-in of a clashing distribution was imported")
