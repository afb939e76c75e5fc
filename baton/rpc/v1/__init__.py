"""Generated from proto/baton/v1 by tools/gen_proto.py; do not edit."""
