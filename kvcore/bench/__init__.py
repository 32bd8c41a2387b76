"""What ops and codecs cost: kvcore, a peer and the machine's memory, alternating in one run. See `kvcore bench`."""
