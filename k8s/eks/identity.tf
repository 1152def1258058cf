# Rights of pods, by EKS Pod Identity: a role per service account, no keys anywhere.

locals {
  pod_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
    }]
  })

  service_accounts = merge(
    {
      ebs-csi          = { namespace = "kube-system", account = "ebs-csi-controller-sa" }
      efs-csi          = { namespace = "kube-system", account = "efs-csi-controller-sa" }
      external-secrets = { namespace = "external-secrets", account = "external-secrets" }
      karpenter        = { namespace = "kube-system", account = "karpenter" }
    },
    var.weights_bucket == "" ? {} : {
      weights = { namespace = var.namespace, account = "${var.release}-weights" }
    },
    var.load_balancer_policy_arn == "" ? {} : {
      load-balancer = { namespace = "kube-system", account = "aws-load-balancer-controller" }
    },
  )

  managed_policies = merge(
    {
      ebs-csi = "arn:aws:iam::aws:policy/service-role/AmazonEBSCSIDriverPolicy"
      efs-csi = "arn:aws:iam::aws:policy/service-role/AmazonEFSCSIDriverPolicy"
    },
    var.load_balancer_policy_arn == "" ? {} : { load-balancer = var.load_balancer_policy_arn },
  )

  own_policies = merge(
    {
      external-secrets = [{
        Effect   = "Allow"
        Action   = ["secretsmanager:GetSecretValue", "secretsmanager:DescribeSecret"]
        Resource = "arn:aws:secretsmanager:${var.region}:${local.account}:secret:${var.name}/*"
      }]
      karpenter = local.karpenter_statements
    },
    var.weights_bucket == "" ? {} : {
      weights = [
        { Effect = "Allow", Action = "s3:ListBucket", Resource = "arn:aws:s3:::${var.weights_bucket}" },
        { Effect = "Allow", Action = "s3:GetObject", Resource = "arn:aws:s3:::${var.weights_bucket}/*" },
      ]
    },
  )

  account = data.aws_caller_identity.this.account_id
}

data "aws_caller_identity" "this" {}

resource "aws_iam_role" "pod" {
  for_each = local.service_accounts

  name               = "${var.name}-${each.key}"
  assume_role_policy = local.pod_trust
}

resource "aws_iam_role_policy_attachment" "pod" {
  for_each = local.managed_policies

  role       = aws_iam_role.pod[each.key].name
  policy_arn = each.value
}

resource "aws_iam_role_policy" "pod" {
  for_each = local.own_policies

  name   = each.key
  role   = aws_iam_role.pod[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = each.value })
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = local.service_accounts

  cluster_name    = aws_eks_cluster.this.name
  namespace       = each.value.namespace
  service_account = each.value.account
  role_arn        = aws_iam_role.pod[each.key].arn
}
