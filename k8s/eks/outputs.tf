output "cluster_name" {
  description = "For: aws eks update-kubeconfig --name"
  value       = aws_eks_cluster.this.name
}

output "node_role" {
  description = "Role of the EC2NodeClasses in k8s/cluster/karpenter.yaml."
  value       = aws_iam_role.node.name
}

output "interruption_queue" {
  description = "settings.interruptionQueue of Karpenter's chart."
  value       = aws_sqs_queue.interruptions.name
}

output "registry" {
  description = "REGISTRY of k8s/cluster/values/serve-app.yaml: what stands before /serve-app in the image's name."
  value       = trimsuffix(aws_ecr_repository.serve_app.repository_url, "/serve-app")
}

output "efs_id" {
  description = "fileSystemId of the StorageClass in k8s/cluster/storage.yaml."
  value       = aws_efs_file_system.weights.id
}

output "vpc_id" {
  description = "vpcId of the AWS Load Balancer Controller's chart."
  value       = aws_vpc.this.id
}

output "vpc_cidr" {
  description = "networkPolicies.clients of the chart, for the load balancer."
  value       = var.cidr
}
