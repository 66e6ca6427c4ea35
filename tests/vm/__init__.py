"""A virtual machine with a BMC and an AC plug, and the power-on methods proven in it."""
