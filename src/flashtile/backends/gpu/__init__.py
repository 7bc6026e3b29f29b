"""What both GPU backends share: launches, the driver, device code, calls over a cache."""
