"""The command line tool: `mmrouter up | verify | explain`, and the entry of every container."""
