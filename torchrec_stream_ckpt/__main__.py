"""``python -m torchrec_stream_ckpt``: the command line, where ``stream-ckpt`` is not on the path."""

from torchrec_stream_ckpt.cli.main import main

if __name__ == "__main__":
    main()
