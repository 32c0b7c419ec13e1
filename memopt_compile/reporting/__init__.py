"""What people see of a step: tables, pictures, files, and questions asked of plans without running any."""
