"""Makes pictures of prompts, denoising step by denoising step."""
