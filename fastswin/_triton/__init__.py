"""What every kernel shares: device functions, capability checks, allocation."""
