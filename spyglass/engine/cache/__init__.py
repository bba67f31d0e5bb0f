"""Memory for rows of sequences: pages, snapshots of prefixes, rows of encoded images."""
