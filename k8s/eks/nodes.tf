# The nodes that are always there: EKS's add-ons, operators, monitoring, and as much of the release's CPU pods as fits. Nothing scales them:
# Karpenter, which runs here itself, makes the other CPU nodes (k8s/cluster/karpenter.yaml). On demand: an ingress holds streams that end
# with its node.

resource "aws_iam_role" "node" {
  name = "${var.name}-node"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset([
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryPullOnly",
    "AmazonSSMManagedInstanceCore",
  ])

  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/${each.key}"
}

resource "aws_launch_template" "cpu" {
  name_prefix = "${var.name}-cpu-"

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods get rights by Pod Identity, not from the node's
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = 100 # the CPU image and what Ray logs
      encrypted             = true
      delete_on_termination = true
    }
  }
}

resource "aws_eks_node_group" "cpu" {
  cluster_name    = aws_eks_cluster.this.name
  version         = aws_eks_cluster.this.version # or the nodes would stay at the version that they were made with
  node_group_name = "cpu"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [for subnet in aws_subnet.private : subnet.id]
  ami_type        = "AL2023_x86_64_STANDARD"
  capacity_type   = "ON_DEMAND"
  instance_types  = var.cpu_nodes.instance_types

  labels = { "serve-app/nodes" = "cpu" }

  launch_template {
    id      = aws_launch_template.cpu.id
    version = aws_launch_template.cpu.latest_version
  }

  scaling_config {
    min_size     = var.cpu_nodes.num
    max_size     = var.cpu_nodes.num
    desired_size = var.cpu_nodes.num
  }

  # One node at a time: for a new version or launch template, and for a repair. Ten or thirty minutes after the node monitoring agent, or
  # the kubelet, has called a node unhealthy, EKS replaces it.
  update_config {
    max_unavailable = 1
  }

  node_repair_config {
    enabled = true
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}
