resource "aws_iam_role" "cluster" {
  name = "${var.name}-cluster"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_kms_key" "secrets" {
  description             = "Secrets of the EKS cluster ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
}

# Made before EKS does, or the logs would be kept for ever.
resource "aws_cloudwatch_log_group" "cluster" {
  name              = "/aws/eks/${var.name}/cluster"
  retention_in_days = 90
}

resource "aws_eks_cluster" "this" {
  name                      = var.name
  version                   = var.kubernetes_version
  role_arn                  = aws_iam_role.cluster.arn
  enabled_cluster_log_types = ["api", "audit", "authenticator"]

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = false
  }

  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.api_cidrs) > 0
    public_access_cidrs     = length(var.api_cidrs) > 0 ? var.api_cidrs : null
  }

  encryption_config {
    resources = ["secrets"]

    provider {
      key_arn = aws_kms_key.secrets.arn
    }
  }

  upgrade_policy {
    support_type = "STANDARD"
  }

  depends_on = [aws_iam_role_policy_attachment.cluster, aws_cloudwatch_log_group.cluster]
}

# Karpenter's nodes find their security group by this tag.
resource "aws_ec2_tag" "security_group" {
  resource_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  key         = "karpenter.sh/discovery"
  value       = var.name
}

resource "aws_eks_access_entry" "admin" {
  for_each = toset(var.admins)

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.key
}

resource "aws_eks_access_policy_association" "admin" {
  for_each = toset(var.admins)

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.key
  policy_arn    = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"

  access_scope {
    type = "cluster"
  }

  depends_on = [aws_eks_access_entry.admin]
}

locals {
  # Every key has a version in var.addon_versions.
  addons = {
    # The chart's NetworkPolicies count only where the CNI enforces them; EKS does not unless told.
    vpc-cni                = jsonencode({ enableNetworkPolicy = "true" })
    kube-proxy             = null
    coredns                = null
    eks-pod-identity-agent = null
    metrics-server         = null
    aws-ebs-csi-driver     = null
    aws-efs-csi-driver     = null
    # Reads each node's logs and, through DCGM, its GPUs, and sets the conditions by which a node is repaired. The DCGM half tolerates no
    # taint by itself and would be on no GPU node.
    eks-node-monitoring-agent = jsonencode({ dcgmAgent = { tolerations = [{ operator = "Exists" }] } })
  }
}

resource "aws_eks_addon" "this" {
  for_each = local.addons

  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = var.addon_versions[each.key]
  configuration_values        = each.value
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "PRESERVE"

  # CoreDNS and the storage drivers' controllers need a node to become healthy. EKS gives every new cluster plain copies of the first
  # three, so nodes come up without these.
  depends_on = [aws_eks_node_group.cpu, aws_eks_pod_identity_association.this]
}
