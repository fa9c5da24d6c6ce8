"""Where weights lie: one file for each tier of memory."""
