"""What everything else stands on: errors, settings, Band, merged states, the random numbers of dropout."""
