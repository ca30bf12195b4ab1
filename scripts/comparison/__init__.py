"""The parts of scripts/check_comparison."""
