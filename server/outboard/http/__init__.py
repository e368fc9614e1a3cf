"""The HTTP side: routes, bodies, problems. Routes hold no logic beyond the protocol."""
