"""Does a battery carry a host, or all hosts of a rack, and what would make it do so? For `plan`; no outage asks it.

The answers come from the machine's own conditions, run forward from a full battery. Nothing in the core imports this
package.
"""
