"""The page of the read-only port: what it shows (`view`), its words (`words`), live updates and reports (`updates`)."""
