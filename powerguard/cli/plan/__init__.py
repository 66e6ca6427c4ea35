"""The verb `plan`: what would happen next and when, with a picture; and `plan --size`."""
