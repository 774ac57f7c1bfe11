"""Reports of a finished run: terminal table, plots, and one self-contained HTML page. All derived from results and traces."""
