"""TODO request"""
