"""What only a device can tell, found out in one run of a few minutes: `make device-check`. See docs/device-check.md."""
