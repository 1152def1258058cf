variable "name" {
  description = "Name of the EKS cluster and prefix of all that belongs to it."
  type        = string
  default     = "serve-app"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,37}$", var.name))
    error_message = "name must be lower case letters, digits and dashes, at most 38 characters: IAM names are made from it."
  }
}

variable "region" {
  description = "AWS region."
  type        = string
}

variable "kubernetes_version" {
  description = "Version of EKS. The chart needs 1.30 or later (preStop sleep); its cluster tests run on 1.34."
  type        = string
  # In AWS's standard support until 27 March 2027 (1.34 until 2 December 2026). After that EKS upgrades the control plane by itself, because
  # upgrade_policy in cluster.tf refuses extended support, which costs six times as much.
  # AWS's user guide names 1.36 too; the versions of its add-ons, which belong below, could not be looked up without an account.
  default = "1.35"

  validation {
    condition     = can(regex("^1\\.[3-9][0-9]$", var.kubernetes_version))
    error_message = "kubernetes_version must be 1.30 or later, without a patch number."
  }
}

variable "addon_versions" {
  description = "Version of each EKS add-on: aws eks describe-addon-versions --kubernetes-version 1.35 --addon-name NAME lists them."
  type        = map(string)
  default = {
    vpc-cni                   = "v1.21.1-eksbuild.8"
    kube-proxy                = "v1.35.3-eksbuild.5"
    coredns                   = "v1.14.2-eksbuild.4"
    eks-pod-identity-agent    = "v1.3.10-eksbuild.3"
    metrics-server            = "v0.8.1-eksbuild.6"
    aws-ebs-csi-driver        = "v1.59.0-eksbuild.1"
    aws-efs-csi-driver        = "v3.0.1-eksbuild.1"
    eks-node-monitoring-agent = "v1.6.4-eksbuild.1"
  }

  validation {
    condition     = alltrue([for version in values(var.addon_versions) : can(regex("^v[0-9.]+-eksbuild\\.[0-9]+$", version))])
    error_message = "Each of addon_versions must be whole, like v1.14.2-eksbuild.4: a part of a version is no pin."
  }

  validation {
    condition     = startswith(var.addon_versions["kube-proxy"], "v${var.kubernetes_version}.")
    error_message = "kube-proxy in addon_versions must be of kubernetes_version: choose the add-ons' versions anew when that changes."
  }
}

variable "cidr" {
  description = "Address range of the VPC, a /16. The chart's networkPolicies.clients names it for the load balancer."
  type        = string
  default     = "10.0.0.0/16"

  validation {
    condition     = can(cidrnetmask(var.cidr)) && endswith(var.cidr, "/16")
    error_message = "cidr must be an IPv4 range that ends with /16."
  }
}

variable "num_zones" {
  description = "Availability zones to use, 2 or 3. GPUs are often sold out in one and not in another."
  type        = number
  default     = 3

  validation {
    condition     = contains([2, 3], var.num_zones)
    error_message = "num_zones must be 2 or 3: EKS needs two."
  }
}

variable "exclude_zone_ids" {
  description = "Ids of availability zones not to use: by default those in which EKS makes no control plane. Add one without your GPUs."
  type        = list(string)
  default     = ["use1-az3", "usw1-az2", "cac1-az3"]
}

variable "nat_per_zone" {
  description = "One NAT gateway per zone instead of one for all. Costs more, survives the loss of a zone."
  type        = bool
  default     = true
}

variable "api_cidrs" {
  description = "Address ranges that may reach the API server from outside the VPC. Empty: nobody, use a VPN or a bastion."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.api_cidrs, "0.0.0.0/0")
    error_message = "api_cidrs must not be the whole internet; name your own ranges."
  }
}

variable "admins" {
  description = "ARNs of IAM roles that administer the cluster."
  type        = list(string)
}

variable "cpu_nodes" {
  description = "The CPU nodes that are always there, for add-ons, operators and monitoring. Karpenter, which runs on two, adds others."
  type = object({
    instance_types = optional(list(string), ["m7i.xlarge"])
    num            = optional(number, 2)
  })
  default = {}

  validation {
    condition     = var.cpu_nodes.num >= 2
    error_message = "cpu_nodes.num must be at least 2: Karpenter, which replaces lost nodes, runs on two of them."
  }
}

variable "namespace" {
  description = "Kubernetes namespace of the release, for the identity of the job that downloads weights."
  type        = string
  default     = "serve-app"
}

variable "release" {
  description = "Name of the Helm release, for the same."
  type        = string
  default     = "serve-app"
}

variable "weights_bucket" {
  description = "S3 bucket with model weights that the download job may read. Empty: no such right."
  type        = string
  default     = ""
}

variable "load_balancer_policy_arn" {
  description = "ARN of the IAM policy of the AWS Load Balancer Controller, made from the file that its release ships. Empty: no right."
  type        = string
  default     = ""
}

variable "kept_images" {
  description = "Tagged images that the registry keeps; a release pushes two. The oldest beyond them go, even one that pods run."
  type        = number
  default     = 60
}
