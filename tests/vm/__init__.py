"""A virtual machine with a BMC and an AC plug, and the ways back proven in it."""
