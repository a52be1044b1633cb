"""What a step will need: rehearsed without data, forecast for any length."""
