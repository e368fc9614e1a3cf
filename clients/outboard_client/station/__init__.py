"""The field station: frames from a folder, a video, a camera or RTSP to an Outboard server, over a link that fails."""
