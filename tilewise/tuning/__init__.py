"""How large tiles are: configurations as data, looked up and never tuned inside a call."""
