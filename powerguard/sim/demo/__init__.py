"""The demo: its story, played live on real protocols, or fast in virtual time."""
