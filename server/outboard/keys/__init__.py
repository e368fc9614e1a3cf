"""API keys: who may use a server that others can reach (docs/security.md)."""
