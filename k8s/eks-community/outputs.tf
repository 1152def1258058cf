# What ../eks/outputs.tf describes, by the same names.

output "cluster_name" {
  value = module.eks.cluster_name
}

output "node_role" {
  value = module.karpenter.node_iam_role_name
}

output "interruption_queue" {
  value = module.karpenter.queue_name
}

output "registry" {
  value = trimsuffix(aws_ecr_repository.serve_app.repository_url, "/serve-app")
}

output "efs_id" {
  value = module.weights.id
}

output "vpc_id" {
  value = module.vpc.vpc_id
}

output "vpc_cidr" {
  value = var.cidr
}
