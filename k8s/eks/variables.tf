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
  description = "Version of EKS. The chart needs 1.30 or later (preStop sleep); tests run on 1.34."
  type        = string
  default     = "1.34"
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
  description = "The group of CPU nodes for Ray's head, ingress pods, operators and monitoring."
  type = object({
    instance_types = optional(list(string), ["m7i.xlarge"])
    min            = optional(number, 2)
    max            = optional(number, 6)
  })
  default = {}
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
