"""TODO parsing"""
