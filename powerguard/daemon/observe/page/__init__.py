"""The page of the read-only port: what it shows (`view`), its words (`words`), and the live updates (`updates`)."""
