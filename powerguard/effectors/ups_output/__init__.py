"""The output of a UPS, switched off after a delay and on again when utility returns."""
