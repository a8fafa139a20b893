"""What a user of a notebook waits for: cells, output, start, transfer, recovery, a click, the dashboard."""
