"""A simulated fleet runs the product's routing, queueing and scaling code in simulated time, for replays and benchmarks."""
