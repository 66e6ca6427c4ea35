"""The verb `import`: settings made of a NUT or apcupsd configuration."""
