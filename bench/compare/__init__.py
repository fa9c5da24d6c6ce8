"""What all peers of a comparison share."""
