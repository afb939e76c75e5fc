"""An admin service for test servers that stand for a router and change no cluster."""

import grpc

from baton.rpc.v1 import admin_pb2_grpc


class QuietAdmin(admin_pb2_grpc.AdminServicer):
    """Rejects all calls that change a cluster or return more than its status."""

    def _reject(self, request, context):
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    Scale = Drain = Restart = Watch = Trace = _reject
