"""Weight placement and streaming: tiers (device, host, disk), streamers, expert caches."""
