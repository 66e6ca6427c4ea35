"""What if: worlds that cannot be bought, and peers that lie.

`world` plays an outage without real time, `looped` plays the real loop in virtual time, `cluster` plays one job on
several hosts, `replay` plays a recording, and `demo` plays real programs against simulated peers.
"""
