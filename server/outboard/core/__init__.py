"""The engine: values in, values out. No clock, no sockets, no threads, no asyncio, no torch."""
