# `terraform test` plans everything against a pretended AWS: no account and no network are needed.

mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-west-1a", "eu-west-1b", "eu-west-1c"] }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
}

variables {
  region = "eu-west-1"
  admins = ["arn:aws:iam::111122223333:role/admin"]
}

run "defaults" {
  command = plan

  assert {
    condition     = length(aws_subnet.private) == 3 && length(aws_nat_gateway.this) == 3
    error_message = "a private subnet and a NAT gateway per zone"
  }

  assert {
    condition     = contains(data.aws_availability_zones.this.exclude_zone_ids, "use1-az3")
    error_message = "zones that EKS refuses are left out"
  }

  assert {
    condition     = length(distinct([for s in concat(values(aws_subnet.private), values(aws_subnet.public)) : s.cidr_block])) == 6
    error_message = "subnets must not overlap"
  }

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_public_access == false
    error_message = "nobody outside reaches the API server unless told"
  }

  assert {
    condition     = jsondecode(aws_eks_addon.this["vpc-cni"].configuration_values).enableNetworkPolicy == "true"
    error_message = "the CNI enforces NetworkPolicies"
  }

  assert {
    condition     = aws_eks_node_group.cpu.capacity_type == "ON_DEMAND" && aws_eks_node_group.cpu.labels["serve-app/nodes"] == "cpu"
    error_message = "ingress nodes are on demand and carry the chart's label"
  }

  assert {
    condition     = alltrue([for addon in aws_eks_addon.this : addon.addon_version != null]) && toset(keys(aws_eks_addon.this)) == toset(keys(var.addon_versions))
    error_message = "every add-on has a version, and no version is left over"
  }

  assert {
    condition = (
      jsondecode(aws_eks_addon.this["eks-node-monitoring-agent"].configuration_values).dcgmAgent.tolerations[0].operator == "Exists"
      && aws_eks_node_group.cpu.node_repair_config[0].enabled
    )
    error_message = "GPU nodes are watched through their taint, CPU nodes are repaired"
  }

  assert {
    condition     = aws_eks_node_group.cpu.update_config[0].max_unavailable == 1 && aws_eks_node_group.cpu.version == aws_eks_cluster.this.version
    error_message = "CPU nodes follow the cluster's version, one at a time"
  }

  assert {
    condition     = alltrue([for subnet in aws_subnet.private : subnet.tags["karpenter.sh/discovery"] == "serve-app"])
    error_message = "Karpenter finds the subnets of every zone, so that a volume's zone always gets a node"
  }

  assert {
    condition = (
      aws_ecr_repository.serve_app.image_tag_mutability == "IMMUTABLE" && aws_ecr_repository.serve_app.image_scanning_configuration[0].scan_on_push
      && jsondecode(aws_ecr_lifecycle_policy.serve_app.policy).rules[1].selection.countNumber == 60
    )
    error_message = "images are scanned, their tags stay what they were, old ones go"
  }

  assert {
    condition     = sort(keys(aws_eks_pod_identity_association.this)) == sort(["ebs-csi", "efs-csi", "external-secrets", "karpenter"])
    error_message = "rights that were not asked for"
  }
}

run "everything_on" {
  command = plan

  variables {
    api_cidrs                = ["198.51.100.0/24"]
    nat_per_zone             = false
    num_zones                = 2
    weights_bucket           = "weights"
    load_balancer_policy_arn = "arn:aws:iam::111122223333:policy/load-balancer"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route_table.private) == 2
    error_message = "one NAT gateway for all zones"
  }

  assert {
    condition     = aws_eks_pod_identity_association.this["weights"].service_account == "serve-app-weights"
    error_message = "the account of the chart's download job"
  }

  assert {
    condition     = strcontains(aws_iam_role_policy.pod["weights"].policy, "arn:aws:s3:::weights/*")
    error_message = "the download job reads the bucket"
  }
}

run "the_internet_is_refused" {
  command = plan

  variables {
    api_cidrs = ["0.0.0.0/0"]
  }

  expect_failures = [var.api_cidrs]
}

run "addons_of_another_kubernetes_are_refused" {
  command = plan

  variables {
    kubernetes_version = "1.36"
  }

  expect_failures = [var.addon_versions]
}

run "a_part_of_a_version_is_refused" {
  command = plan

  variables {
    addon_versions = { kube-proxy = "v1.35.3-eksbuild.5", coredns = "v1.14" }
  }

  expect_failures = [var.addon_versions]
}

run "one_cpu_node_is_refused" {
  command = plan

  variables {
    cpu_nodes = { num = 1 }
  }

  expect_failures = [var.cpu_nodes]
}
