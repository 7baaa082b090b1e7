"""The names and conventions of other libraries: they are renamed to tilewise's, nothing is computed here."""
