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
