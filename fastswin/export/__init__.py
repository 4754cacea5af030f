"""Models for other runtimes: ONNX with its parity check, 8-bit Q/DQ graphs, torch.export."""
