# Weights: one file system that every zone's pods read; the chart's job fills it once.

resource "aws_efs_file_system" "weights" {
  creation_token  = "${var.name}-weights"
  encrypted       = true
  throughput_mode = "elastic"

  tags = { Name = "${var.name}-weights" }
}

resource "aws_security_group" "efs" {
  name        = "${var.name}-efs"
  description = "NFS from the nodes of ${var.name}"
  vpc_id      = aws_vpc.this.id
}

resource "aws_vpc_security_group_ingress_rule" "efs" {
  security_group_id            = aws_security_group.efs.id
  referenced_security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  description                  = "NFS"
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
}

resource "aws_efs_mount_target" "weights" {
  for_each = aws_subnet.private

  file_system_id  = aws_efs_file_system.weights.id
  subnet_id       = each.value.id
  security_groups = [aws_security_group.efs.id]
}
