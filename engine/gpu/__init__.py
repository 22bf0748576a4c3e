"""What a GPU needs beside the model: its attention backend, a fused decoder, recorded steps, copies, a watch."""
