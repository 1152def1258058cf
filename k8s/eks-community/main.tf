# The layout of ../eks by the community's modules, for teams that have their patterns around these. Same variables, same outputs: README.md
# goes on from here as from ../eks. Never planned: the modules and the providers they need were not at hand. What they are given was
# checked against their variables, in the versions below, and what is taken from them against their outputs.

locals {
  zones   = slice(data.aws_availability_zones.this.names, 0, var.num_zones)
  account = data.aws_caller_identity.this.account_id

  # As in ../eks/cluster.tf.
  addon_settings = {
    vpc-cni                   = jsonencode({ enableNetworkPolicy = "true" })
    eks-node-monitoring-agent = jsonencode({ dcgmAgent = { tolerations = [{ operator = "Exists" }] } })
  }

  addon_roles = {
    aws-ebs-csi-driver = [{ role_arn = module.ebs_csi.iam_role_arn, service_account = "ebs-csi-controller-sa" }]
    aws-efs-csi-driver = [{ role_arn = module.efs_csi.iam_role_arn, service_account = "efs-csi-controller-sa" }]
  }
}

data "aws_caller_identity" "this" {}

data "aws_availability_zones" "this" {
  state            = "available"
  exclude_zone_ids = var.exclude_zone_ids

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

module "vpc" {
  source  = "terraform-aws-modules/vpc/aws"
  version = "6.6.0"

  name = var.name
  cidr = var.cidr
  azs  = local.zones

  private_subnets     = [for index, zone in local.zones : cidrsubnet(var.cidr, 3, index)]
  public_subnets      = [for index, zone in local.zones : cidrsubnet(var.cidr, 8, 240 + index)]
  private_subnet_tags = { "kubernetes.io/role/internal-elb" = "1", "karpenter.sh/discovery" = var.name }
  public_subnet_tags  = { "kubernetes.io/role/elb" = "1" }

  enable_nat_gateway     = true
  one_nat_gateway_per_az = var.nat_per_zone
  single_nat_gateway     = !var.nat_per_zone
}

module "endpoints" {
  source  = "terraform-aws-modules/vpc/aws//modules/vpc-endpoints"
  version = "6.6.0"

  vpc_id = module.vpc.vpc_id
  endpoints = {
    s3 = { service = "s3", service_type = "Gateway", route_table_ids = module.vpc.private_route_table_ids }
  }
}

module "eks" {
  source  = "terraform-aws-modules/eks/aws"
  version = "21.19.0"

  name               = var.name
  kubernetes_version = var.kubernetes_version
  upgrade_policy     = { support_type = "STANDARD" }
  enabled_log_types  = ["api", "audit", "authenticator"]

  vpc_id                       = module.vpc.vpc_id
  subnet_ids                   = module.vpc.private_subnets
  endpoint_public_access       = length(var.api_cidrs) > 0
  endpoint_public_access_cidrs = length(var.api_cidrs) > 0 ? var.api_cidrs : null
  node_security_group_tags     = { "karpenter.sh/discovery" = var.name }

  access_entries = {
    for arn in var.admins : arn => {
      principal_arn = arn
      policy_associations = {
        admin = {
          policy_arn   = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
          access_scope = { type = "cluster" }
        }
      }
    }
  }

  addons = {
    for name, version in var.addon_versions : name => {
      addon_version               = version
      before_compute              = name == "vpc-cni" || name == "eks-pod-identity-agent"
      configuration_values        = lookup(local.addon_settings, name, null)
      pod_identity_association    = lookup(local.addon_roles, name, null)
      resolve_conflicts_on_create = "OVERWRITE"
    }
  }

  eks_managed_node_groups = {
    cpu = {
      use_name_prefix    = false # Karpenter's own pods ask for eks.amazonaws.com/nodegroup: cpu
      ami_type           = "AL2023_x86_64_STANDARD"
      instance_types     = var.cpu_nodes.instance_types
      min_size           = var.cpu_nodes.num
      max_size           = var.cpu_nodes.num
      desired_size       = var.cpu_nodes.num
      labels             = { "serve-app/nodes" = "cpu" }
      update_config      = { max_unavailable = 1 }
      node_repair_config = { enabled = true }
      block_device_mappings = {
        root = { device_name = "/dev/xvda", ebs = { volume_type = "gp3", volume_size = 100, encrypted = true } }
      }
    }
  }
}

module "karpenter" {
  source  = "terraform-aws-modules/eks/aws//modules/karpenter"
  version = "21.19.0"

  cluster_name                  = module.eks.cluster_name
  node_iam_role_name            = "${var.name}-node"
  node_iam_role_use_name_prefix = false
  node_iam_role_additional_policies = {
    ssm = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
  }
}

module "weights" {
  source  = "terraform-aws-modules/efs/aws"
  version = "2.0.0"

  name                  = "${var.name}-weights"
  creation_token        = "${var.name}-weights"
  encrypted             = true
  throughput_mode       = "elastic"
  attach_policy         = false
  mount_targets         = { for index, zone in local.zones : zone => { subnet_id = module.vpc.private_subnets[index] } }
  security_group_vpc_id = module.vpc.vpc_id
  security_group_ingress_rules = {
    nodes = { referenced_security_group_id = module.eks.node_security_group_id, description = "NFS" }
  }
}

module "ebs_csi" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "2.8.1"

  name                      = "${var.name}-ebs-csi"
  attach_aws_ebs_csi_policy = true
}

module "efs_csi" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "2.8.1"

  name                      = "${var.name}-efs-csi"
  attach_aws_efs_csi_policy = true
}

module "external_secrets" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "2.8.1"

  name                                  = "${var.name}-external-secrets"
  attach_external_secrets_policy        = true
  external_secrets_secrets_manager_arns = ["arn:aws:secretsmanager:${var.region}:${local.account}:secret:${var.name}/*"]
  associations = {
    this = { cluster_name = module.eks.cluster_name, namespace = "external-secrets", service_account = "external-secrets" }
  }
}

module "load_balancer" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "2.8.1"
  count   = var.load_balancer_policy_arn == "" ? 0 : 1

  name                   = "${var.name}-load-balancer"
  additional_policy_arns = { this = var.load_balancer_policy_arn }
  associations = {
    this = { cluster_name = module.eks.cluster_name, namespace = "kube-system", service_account = "aws-load-balancer-controller" }
  }
}

module "weights_job" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "2.8.1"
  count   = var.weights_bucket == "" ? 0 : 1

  name                 = "${var.name}-weights"
  attach_custom_policy = true
  policy_statements = [
    { actions = ["s3:ListBucket"], resources = ["arn:aws:s3:::${var.weights_bucket}"] },
    { actions = ["s3:GetObject"], resources = ["arn:aws:s3:::${var.weights_bucket}/*"] },
  ]
  associations = {
    this = { cluster_name = module.eks.cluster_name, namespace = var.namespace, service_account = "${var.release}-weights" }
  }
}
