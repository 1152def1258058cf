# What Karpenter needs outside the cluster: its nodes' right to join (nodes.tf), its own rights, and word of spot interruptions.
# The rights follow Karpenter's reference policy of v1: it may touch only what carries the cluster's tag.

locals {
  ec2       = "arn:aws:ec2:${var.region}"
  owned_tag = "kubernetes.io/cluster/${var.name}"

  karpenter_statements = [
    {
      Sid    = "UseImagesAndNetwork"
      Effect = "Allow"
      Action = ["ec2:RunInstances", "ec2:CreateFleet"]
      Resource = [
        "${local.ec2}::image/*", "${local.ec2}::snapshot/*", "${local.ec2}:*:security-group/*", "${local.ec2}:*:subnet/*",
        "${local.ec2}:*:capacity-reservation/*", "${local.ec2}:*:placement-group/*",
      ]
    },
    {
      Sid       = "UseOwnTemplates"
      Effect    = "Allow"
      Action    = ["ec2:RunInstances", "ec2:CreateFleet"]
      Resource  = "${local.ec2}:*:launch-template/*"
      Condition = { StringEquals = { "aws:ResourceTag/${local.owned_tag}" = "owned" } }
    },
    {
      Sid    = "CreateTagged"
      Effect = "Allow"
      Action = ["ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateLaunchTemplate"]
      Resource = [for kind in ["fleet", "instance", "volume", "network-interface", "launch-template", "spot-instances-request"] :
      "${local.ec2}:*:${kind}/*"]
      Condition = {
        StringEquals = { "aws:RequestTag/${local.owned_tag}" = "owned", "aws:RequestTag/eks:eks-cluster-name" = var.name }
        StringLike   = { "aws:RequestTag/karpenter.sh/nodepool" = "*" }
      }
    },
    {
      Sid    = "TagWhatItCreates"
      Effect = "Allow"
      Action = "ec2:CreateTags"
      Resource = [for kind in ["fleet", "instance", "volume", "network-interface", "launch-template", "spot-instances-request"] :
      "${local.ec2}:*:${kind}/*"]
      Condition = {
        StringEquals = {
          "aws:RequestTag/${local.owned_tag}"   = "owned"
          "aws:RequestTag/eks:eks-cluster-name" = var.name
          "ec2:CreateAction"                    = ["RunInstances", "CreateFleet", "CreateLaunchTemplate"]
        }
        StringLike = { "aws:RequestTag/karpenter.sh/nodepool" = "*" }
      }
    },
    {
      Sid      = "NameItsInstances"
      Effect   = "Allow"
      Action   = "ec2:CreateTags"
      Resource = "${local.ec2}:*:instance/*"
      Condition = {
        StringEquals                = { "aws:ResourceTag/${local.owned_tag}" = "owned" }
        StringLike                  = { "aws:ResourceTag/karpenter.sh/nodepool" = "*" }
        StringEqualsIfExists        = { "aws:RequestTag/eks:eks-cluster-name" = var.name }
        "ForAllValues:StringEquals" = { "aws:TagKeys" = ["eks:eks-cluster-name", "karpenter.sh/nodeclaim", "Name"] }
      }
    },
    {
      Sid      = "DeleteItsOwn"
      Effect   = "Allow"
      Action   = ["ec2:TerminateInstances", "ec2:DeleteLaunchTemplate"]
      Resource = ["${local.ec2}:*:instance/*", "${local.ec2}:*:launch-template/*"]
      Condition = {
        StringEquals = { "aws:ResourceTag/${local.owned_tag}" = "owned" }
        StringLike   = { "aws:ResourceTag/karpenter.sh/nodepool" = "*" }
      }
    },
    {
      Sid    = "Look"
      Effect = "Allow"
      Action = [
        "ec2:DescribeCapacityReservations", "ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeInstanceStatus",
        "ec2:DescribeInstanceTypeOfferings", "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplates",
        "ec2:DescribePlacementGroups", "ec2:DescribeSecurityGroups", "ec2:DescribeSpotPriceHistory", "ec2:DescribeSubnets",
      ]
      Resource  = "*"
      Condition = { StringEquals = { "aws:RequestedRegion" = var.region } }
    },
    { Sid = "ImageIds", Effect = "Allow", Action = "ssm:GetParameter", Resource = "arn:aws:ssm:${var.region}::parameter/aws/service/*" },
    { Sid = "Prices", Effect = "Allow", Action = "pricing:GetProducts", Resource = "*" },
    {
      Sid       = "GiveNodesTheirRole"
      Effect    = "Allow"
      Action    = "iam:PassRole"
      Resource  = aws_iam_role.node.arn
      Condition = { StringEquals = { "iam:PassedToService" = "ec2.amazonaws.com" } }
    },
    {
      Sid      = "MakeInstanceProfiles"
      Effect   = "Allow"
      Action   = ["iam:CreateInstanceProfile", "iam:TagInstanceProfile"]
      Resource = "arn:aws:iam::${local.account}:instance-profile/*"
      Condition = {
        StringEquals = {
          "aws:RequestTag/${local.owned_tag}"            = "owned"
          "aws:RequestTag/eks:eks-cluster-name"          = var.name
          "aws:RequestTag/topology.kubernetes.io/region" = var.region
        }
      }
    },
    {
      Sid      = "ChangeInstanceProfiles"
      Effect   = "Allow"
      Action   = ["iam:AddRoleToInstanceProfile", "iam:RemoveRoleFromInstanceProfile", "iam:DeleteInstanceProfile"]
      Resource = "arn:aws:iam::${local.account}:instance-profile/*"
      Condition = {
        StringEquals = {
          "aws:ResourceTag/${local.owned_tag}"            = "owned"
          "aws:ResourceTag/topology.kubernetes.io/region" = var.region
        }
      }
    },
    {
      Sid      = "ReadInstanceProfiles"
      Effect   = "Allow"
      Action   = ["iam:GetInstanceProfile", "iam:ListInstanceProfiles"]
      Resource = "*"
    },
    { Sid = "Endpoint", Effect = "Allow", Action = "eks:DescribeCluster", Resource = aws_eks_cluster.this.arn },
    {
      Sid      = "Interruptions"
      Effect   = "Allow"
      Action   = ["sqs:DeleteMessage", "sqs:GetQueueUrl", "sqs:ReceiveMessage"]
      Resource = aws_sqs_queue.interruptions.arn
    },
  ]
}

# The nodes that Karpenter makes have the role of nodes.tf. EKS lets managed groups' roles in by itself, and adds no second entry.

resource "aws_sqs_queue" "interruptions" {
  name                      = "${var.name}-interruptions"
  message_retention_seconds = 300
  sqs_managed_sse_enabled   = true
}

resource "aws_sqs_queue_policy" "interruptions" {
  queue_url = aws_sqs_queue.interruptions.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect    = "Allow"
        Action    = "sqs:SendMessage"
        Resource  = aws_sqs_queue.interruptions.arn
        Principal = { Service = ["events.amazonaws.com", "sqs.amazonaws.com"] }
      },
      {
        Effect    = "Deny"
        Action    = "sqs:*"
        Resource  = aws_sqs_queue.interruptions.arn
        Principal = "*"
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
    ]
  })
}

locals {
  interruptions = {
    spot      = { source = "aws.ec2", type = "EC2 Spot Instance Interruption Warning" }
    rebalance = { source = "aws.ec2", type = "EC2 Instance Rebalance Recommendation" }
    state     = { source = "aws.ec2", type = "EC2 Instance State-change Notification" }
    health    = { source = "aws.health", type = "AWS Health Event" }
  }
}

resource "aws_cloudwatch_event_rule" "interruptions" {
  for_each = local.interruptions

  name          = "${var.name}-${each.key}"
  event_pattern = jsonencode({ source = [each.value.source], "detail-type" = [each.value.type] })
}

resource "aws_cloudwatch_event_target" "interruptions" {
  for_each = local.interruptions

  rule = aws_cloudwatch_event_rule.interruptions[each.key].name
  arn  = aws_sqs_queue.interruptions.arn
}
