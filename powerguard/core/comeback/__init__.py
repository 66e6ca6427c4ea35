"""How the host comes back: methods of powering on, the gate at boot, and what is done when the daemon starts."""
