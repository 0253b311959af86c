"""A loaded model as a service for many agents, in this process and with others."""
