"""An admin service for test servers that stand for a router and change no cluster."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from baton.rpc.v1 import admin_pb2, admin_pb2_grpc


class QuietAdmin(admin_pb2_grpc.AdminServicer):
    """Rejects all calls that change a cluster or return more than its status."""

    def Scale(self, request: admin_pb2.ScaleRequest, context: grpc.ServicerContext) -> admin_pb2.ScaleReply:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError

    def Drain(self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext) -> admin_pb2.DrainReply:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError

    def Restart(self, request: admin_pb2.RestartRequest, context: grpc.ServicerContext) -> admin_pb2.RestartReply:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError

    def Watch(self, request: admin_pb2.WatchRequest, context: grpc.ServicerContext) -> Iterator[admin_pb2.Live]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError

    def Trace(self, request: admin_pb2.TraceRequest, context: grpc.ServicerContext) -> admin_pb2.TraceReply:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError
